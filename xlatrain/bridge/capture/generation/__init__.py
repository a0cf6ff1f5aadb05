"""``model.generate(…)`` of the ``transformers`` library in steps: its decoding loops as loops of the program."""
