"""What a job leaves open, decided by one loop: variants of the job, one evaluation of each, moves around the best."""
