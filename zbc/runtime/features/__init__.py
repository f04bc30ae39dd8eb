"""What a plan may ask for beside the pipeline, each with its ops, its state and its hooks (core/feature.py)."""
