//! The only unsafe calls into the CUDA driver and NVRTC, each opened at run time.
