"""Stands for mpi4py, which needs an MPI library: ranks from the environment, messages through files."""
