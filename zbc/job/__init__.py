"""From the TOML of a job to the job, with every problem of it at its place."""
