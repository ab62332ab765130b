"""The critical path over all ranks, and what the job would gain without each of its parts."""
