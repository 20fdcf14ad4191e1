"""What profilers recorded of a run: PyTorch's traces and Nsight Systems' exports, as figures and Timelines."""
