"""Declarations of options and checks of their values, for every room that has options."""
