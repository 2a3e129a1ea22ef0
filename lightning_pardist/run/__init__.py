"""STEP 4: one training or evaluation step on a spread module."""
