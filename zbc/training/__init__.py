"""All that training needs around the runtime: data, models, checkpoints, launching, watching."""
