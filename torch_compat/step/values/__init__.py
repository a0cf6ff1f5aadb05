"""Values of the user's that a step meets: whose they are, what they are told by, and where generators and files stand."""
