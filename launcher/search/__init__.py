"""`gpurun tune`: hundreds of combinations screened in short trials, the best ones compared as in any run."""
