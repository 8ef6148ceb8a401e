"""Plans of many devices: values, cost, memory, tensor layouts and the search of strategies."""
