"""`gpurun gate`: two versions of the code, launched in turns in one session."""
