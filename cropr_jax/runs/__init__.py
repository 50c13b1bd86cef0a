"""What a work directory holds: checkpoints, and the predictor of a run."""
