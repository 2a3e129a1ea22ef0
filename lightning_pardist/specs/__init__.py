"""Frozen values that pass between the steps: config, profile, plan. No behaviour beyond checking and printing."""
