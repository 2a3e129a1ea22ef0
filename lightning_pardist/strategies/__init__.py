"""The outer layer: Lightning's hooks on one side, plan, apply and run on the other."""
