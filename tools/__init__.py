"""What developers run: reports on ops, tables of the API. Not installed with the packages."""
