"""From a job to a plan that is proven."""
