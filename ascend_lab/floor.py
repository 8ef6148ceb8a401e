"""Lists by group the modules that suffice for a complete compiler without special kernels.

The list is called the first floor. Its modules import only each other, except for the imports that
`tests/test_house.py` lists. Without all other modules networks still compile and compute the same
values; they are slower, because the special kernels of `ascend_lab.fused` are missing.

>>> "compiler.compile" in FIRST_FLOOR, "fused.tandem" in FIRST_FLOOR
(True, False)
"""

FLOOR_GROUPS = {
    "What all modules use: typed errors, limits of what users write, lazy names, plug-ins.": """
        errors facade limits moved output plugins
    """,
    "A chip: its cores, buffers, data paths and rates, read from a file.": """
        machine machine.chip machine.chip.model
    """,
    "Its instructions, the programs made of them, and the builder that writes them.": """
        machine.isa machine.isa.builder machine.isa.instructions machine.isa.launch
        machine.isa.memory machine.isa.operands machine.isa.program machine.isa.walk
    """,
    "The simulator: what a program computes and how many cycles it takes.": """
        machine.sim machine.sim.compiled machine.sim.cost machine.sim.fast machine.sim.l2
        machine.sim.timeline machine.sim.values
    """,
    "Layouts of tensors as maps to addresses, and the copy from one map to another.": """
        machine.layout machine.layout.maps
    """,
    "The tensor language: what is computed.": """
        operators operators.dsl operators.dsl.formulas operators.dsl.operations
        operators.dsl.tensor
    """,
    "Schedules of the tensor language, by hand and automatic, and their lowering.": """
        operators.dsl.auto operators.dsl.auto_fuse operators.dsl.auto_tile operators.dsl.boxes
        operators.dsl.emit_cube operators.dsl.emit_folds operators.dsl.emit_formula
        operators.dsl.emit_rows
        operators.dsl.emit_vector operators.dsl.fractals operators.dsl.lower
        operators.dsl.primitives_loops operators.dsl.primitives_tiles operators.dsl.run
        operators.dsl.schedule operators.dsl.stages operators.dsl.tiles
    """,
    "The operators of networks: formula, types, slices and tests of each.": """
        operators.ops operators.ops.casts operators.ops.convolution operators.ops.elementwise
        operators.ops.expressions operators.ops.formats operators.ops.matmul
        operators.ops.moving operators.ops.operator operators.ops.pooling
        operators.ops.reduction operators.ops.slicing
    """,
    "The product and the convolution on the cube, and what follows them lane by lane.": """
        operators.kernels operators.kernels.conv operators.kernels.conv_schedules
        operators.kernels.conv_shape operators.kernels.conv_tiles
        operators.kernels.conv_windows operators.kernels.default_schedules
        operators.kernels.epilogue operators.kernels.epilogue_emit
        operators.kernels.epilogue_plan operators.kernels.gemm operators.kernels.gemm_schedule
        operators.kernels.grids operators.kernels.operand_packing operators.kernels.tiles
        operators.kernels.vector_tail
    """,
    "Kernels that move data: transposes, joins, cuts.": """
        operators.kernels.rearrange operators.kernels.transpose
    """,
    "Graphs of operators, their values, and a few networks.": """
        compiler compiler.counts compiler.draft compiler.evaluate compiler.ir compiler.overflow
        compiler.text_form compiler.zoo compiler.zoo.blocks
        compiler.zoo.convolutional compiler.zoo.mobile compiler.zoo.transformers
    """,
    "Rewrites of graphs: patterns, simplifications, number formats, operators in parts.": """
        compiler.canonical compiler.passes compiler.passes.formats compiler.passes.images
        compiler.passes.recognise compiler.passes.rewrite compiler.passes.simplify
    """,
    "Layouts of a graph's tensors, groups that become one kernel, and what the clock decides.": """
        compiler.aliases compiler.decide compiler.fusion compiler.layout compiler.rules
        compiler.switches
    """,
    "Lowering: from a group of nodes to its kernel.": """
        compiler.lower compiler.lower.conv compiler.lower.epilogue compiler.lower.matmul
        compiler.lower.piece compiler.lower.vector compiler.tasks compiler.values
    """,
    "From a model to its time: the road, the placement of tensors, the time of a network.": """
        compiler.buffers compiler.compile compiler.network compiler.placement
    """,
}
"""For each group, what its modules do and their names, relative to `ascend_lab`."""

FIRST_FLOOR = tuple(name for group in FLOOR_GROUPS.values() for name in group.split())
