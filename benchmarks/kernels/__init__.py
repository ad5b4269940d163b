"""What single kernels reach, beside what the machine could give at best, measured in the same run."""
