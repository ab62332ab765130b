"""The networks of Shi et al. 2016, with the batch sizes that were published."""
