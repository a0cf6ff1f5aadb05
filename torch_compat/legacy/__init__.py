"""Names and semantics of Lightning's eras 1.3 to 1.6, over today's strategies."""
