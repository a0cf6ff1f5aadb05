"""Lightning's checkpoint dict in files and directories, and back."""
