"""Lightning's import names, and names that Lightning had or has and that are not offered here."""
