"""The ``pardist`` command."""
