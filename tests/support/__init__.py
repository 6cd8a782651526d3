"""What tests of all parts share: checkpoints to run and what must come of them."""
