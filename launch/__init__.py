"""Recipes and the commands that train, export and run the demo; may use everything."""
