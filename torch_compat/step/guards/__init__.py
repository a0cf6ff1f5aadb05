"""Guards: values of the host that a captured step reads, compared before every step; another value may need another program."""
