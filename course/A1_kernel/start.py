def kernel(chip_file, rows, width, norm, eps):
    raise NotImplementedError
