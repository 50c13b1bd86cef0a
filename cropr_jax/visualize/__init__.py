"""Pictures of what a model did; needs matplotlib."""
