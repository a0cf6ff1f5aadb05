"""What torch does with values on the host, in forms that can be captured: each module replaces one such thing meanwhile."""
