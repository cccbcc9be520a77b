"""Whether kernels agree with plain operations on this device and this model, tried at load."""
