"""Steps that run op by op in plain torch."""
