"""The path of a GPU without a GPU: the CUDA build of torch and Triton's own driver, on a libcuda and a libcudart that
record and check what they are called with, and compute nothing (tests/driver/recording). Run by make -f tests/sessions.mk test-driver.
"""
