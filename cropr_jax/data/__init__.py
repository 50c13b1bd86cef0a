"""Input pipeline: sources of records, augmentation and evaluation transforms, batches."""
