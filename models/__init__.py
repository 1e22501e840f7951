"""Block-diffusion denoisers: backbones, decoding state and generation; imports torch and safetensors alone."""
