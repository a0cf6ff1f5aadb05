"""Reports on ops and tables of the API, for developers. Not installed with the packages."""
