"""What a captured step reads of the host: found, and compared before every step; another value may need another variant."""
