"""Texts of the rules of exceptions: files, headers, indices, configs and layers, and the caller's arguments.

Each `QloadError` carries the id of one of them as its attribute `rule`. Rules of `verify` without an
exception have their text beside their check in `qload.verify`.
"""

from collections.abc import Mapping

from qload.errors.rule_text import RuleText

FILE_RULES = (
    RuleText(
        id="no-files",
        stage="headers",
        what="""
            The path does not exist, the directory has no `*.safetensors` file, or a file disappeared. Each
            part of a diffusers pipeline (`model_index.json`) is a checkpoint of its own.""",
        why="There is nothing to read.",
        do="Check the path; for a pipeline, name one of its parts.",
        example="./model: no *.safetensors file in this directory",
    ),
    RuleText(
        id="no-tensors",
        stage="headers",
        what="The files contain no tensor, or the index names none.",
        why="A model without weights breaks no other rule, and an empty index hides the files next to it.",
        do="""
            Fetch the files again. If files lie next to an empty index, write the index again from their
            headers.""",
        example="model.safetensors.index.json: names no tensor, and its folder has model.safetensors",
    ),
    RuleText(
        id="not-safetensors",
        stage="headers",
        what="""
            The path is a file of another kind: a Git LFS pointer, a web page, or an unknown kind. qload
            identifies it by its name and its first bytes, and reads no more of it. A model in another format,
            such as GGUF, is an [unsupported-format](unsupported-format.md).""",
        why="""
            The file contains no weights. A file of an unknown kind can run code in a program that opens
            it.""",
        do="Fetch the file again.",
        example="""
            model.safetensors: is a Git LFS pointer in the place of the file, despite its name
            remedy   fetch the file: git lfs pull""",
    ),
    RuleText(
        id="unreadable",
        stage="headers",
        what="""
            The system refuses to read a file, or the path is a directory, a FIFO, a socket or a device; qload
            never opens those.""",
        why="Nothing is known about its tensors.",
        do="Check the permissions and the disk.",
        example="model.safetensors: cannot be read: Permission denied",
    ),
    RuleText(
        id="file-length",
        stage="headers",
        what="""
            The file is shorter or longer than its header says, or its length changed after it was opened.""",
        why="""
            An interrupted download is the most common damage. A program that maps the file into memory reads
            past its end.""",
        do="Fetch the file again.",
        example="model.safetensors: truncated: its header accounts for 75 bytes, the file has 70",
    ),
    RuleText(
        id="file-replaced",
        stage="headers",
        what="""
            A file was written, or replaced by another file of the same name, after its header was read.
            Device, inode, modification time and length show it.""",
        why="""
            The header gives offsets in the old file. In the new file the same bytes may be other tensors, or
            half of the old and half of the new one.""",
        do="Open the checkpoint again when no program writes to it.",
        example="model.safetensors: was written to, or replaced by another file, since it was opened",
    ),
    RuleText(
        id="closed",
        stage="headers",
        what="A tensor was read after its storage was closed.",
        why="The files may have changed since.",
        do="Keep the storage open while tensors are read.",
        example="model.safetensors: read after its storage was closed",
    ),
    RuleText(
        id="shard-gap",
        stage="headers",
        what="""
            Files are numbered `-k-of-n`, and some of the n files are missing: from the directory, or from
            both the index and the directory. Numbers may start at 0 or at 1.""",
        why="A download that stopped between two files leaves a folder of intact files.",
        do="Fetch the missing files.",
        example=(
            "model-00001-of-00003.safetensors: model-00002-of-00003.safetensors not found: "
            "1 of 3 files are missing"
        ),
    ),
)

HEADER_RULES = (
    RuleText(
        id="byte-order",
        stage="headers",
        what="The machine is big-endian.",
        why="The format is little-endian, and qload does not swap bytes.",
        do="Use a little-endian machine.",
        example="./model: safetensors are little-endian, and this machine is not",
    ),
    RuleText(
        id="header-length",
        stage="headers",
        what="""
            The first eight bytes of a file give a header length above the file's length or above the format's
            limit, or the file is too short for a header.""",
        why="Nothing after a wrong length can be trusted.",
        do="Fetch the file again; if the copy is faithful, the writer is broken.",
        example=(
            "model.safetensors: says its header has 9223372036854775808 bytes; the file has 80, the format "
            "allows 100000000"
        ),
    ),
    RuleText(
        id="header-json",
        stage="headers",
        what="The header is not a JSON object in UTF-8 that begins with `{`.",
        why="The header contains the names, dtypes and offsets of all tensors.",
        do="Fetch the file again; if the copy is faithful, the writer is broken.",
        example="model.safetensors: not JSON: Expecting value: line 1 column 12 (char 11)",
    ),
    RuleText(
        id="header-entry",
        stage="headers",
        what="""
            An entry of the header lacks dtype, shape or data_offsets, has other keys, or has a value other
            than a natural number in a place for one. Or its name is longer than 1,024 characters or has
            nothing between two dots, its shape has more than 25 dimensions, or the shape is empty with a
            dimension above 2**24.""",
        why="""
            A shape such as `-2` or `1e3` can make a program read outside of the tensor, and one such as
            `(2**61, 0)` can keep it busy for ever.""",
        do="Fetch the file again; if the copy is faithful, the writer is broken.",
        example="model.safetensors: a: shape [-2] is not a list of at most 25 non-negative integers",
    ),
    RuleText(
        id="dtype",
        stage="headers",
        what="A tensor has a dtype that this version of qload does not read, such as one below a byte.",
        why="Bytes of an unknown dtype have no meaning.",
        do="Use a version of qload that reads it, or ask the writer for another dtype.",
        example="model.safetensors: a: has an unsupported dtype: 'F4'",
    ),
    RuleText(
        id="offset-gap",
        stage="headers",
        what="Bytes between two tensors belong to no tensor.",
        why="The format forbids gaps, because a second file can hide in them.",
        do="Fetch the file again; if the copy is faithful, the writer is broken.",
        example="model.safetensors: b: leaves a hole before it of 4 bytes",
    ),
    RuleText(
        id="offset-overlap",
        stage="headers",
        what="Two tensors claim the same bytes.",
        why="The format forbids it. Such a file is damaged, or made to deceive.",
        do="Fetch the file again; if the copy is faithful, the writer is broken.",
        example="model.safetensors: b: overlaps the tensor before it by 4 bytes",
    ),
    RuleText(
        id="offset-span",
        stage="headers",
        what="Dtype and shape need another number of bytes than data_offsets span.",
        why="One of the three is wrong; a reader that believes it reads bytes of another tensor.",
        do="Fetch the file again; if the copy is faithful, the writer is broken.",
        example="model.safetensors: a: shape [3] of F32 takes 12 bytes, data_offsets span 8",
    ),
    RuleText(
        id="duplicate-key",
        stage="headers",
        what="A JSON object of a header, an index or a config contains a name twice.",
        why="Programs differ in the one they take.",
        do="Fetch the file again; if the copy is faithful, the writer is broken.",
        example="model.safetensors: a: occurs twice in one JSON object",
    ),
    RuleText(
        id="duplicate-tensor",
        stage="headers",
        what="""
            Two files of one checkpoint contain a tensor of the same name. Or a file outside of the index
            contains a tensor that the index has in another file, and some programs read this file instead of
            the index: `model.safetensors`, or shards of another division.""",
        why="The loaded tensor depends on the order of the files, or on the program.",
        do="Remove the file that does not belong to the checkpoint, or name the right files in an index.",
        example="two.safetensors: a: is also in one.safetensors",
    ),
)

INDEX_RULES = (
    RuleText(
        id="index-json",
        stage="headers",
        what="""
            The index is not JSON or has no weight_map from names to files, or a directory has several indices
            and none has the usual name.""",
        why="The index names the files of the checkpoint.",
        do="Fetch the file again; if the copy is faithful, the writer is broken.",
        example="model.safetensors.index.json: weight_map has to map tensor names to file names",
    ),
    RuleText(
        id="index-mismatch",
        stage="headers",
        what="""
            The index places a tensor in a file whose header lacks it, a file contains a tensor without an
            entry in the index, or the index names no tensor of a numbered file in the directory.""",
        why="A stale index hides stored tensors and promises missing ones.",
        do="Write the index again from the headers.",
        example=(
            "one.safetensors: b: model.safetensors.index.json maps it to this file, "
            "and it is in two.safetensors"
        ),
    ),
    RuleText(
        id="index-missing-file",
        stage="headers",
        what="The index names files that do not exist.",
        why="Their tensors would be missing.",
        do="Fetch the missing files.",
        example="model.safetensors.index.json: lost.safetensors not found, with 12 tensors",
    ),
    RuleText(
        id="index-path",
        stage="headers",
        what="""
            The index names something other than a `*.safetensors` file in its own directory: a path with
            `..`, an absolute path, a drive, or another kind of file.""",
        why="""
            A checkpoint must not be able to make a program read other files. Symbolic links are followed.""",
        do="Correct the index.",
        example=(
            "model.safetensors.index.json: names a file that is not a safetensors file in its folder: "
            "'../two.safetensors'"
        ),
    ),
)

CONFIG_RULES = (
    RuleText(
        id="config",
        stage="headers",
        what="""
            A config file is not a regular file or not JSON, or a setting is missing, has the wrong type, or
            contradicts another spelling of the same setting.""",
        why="A server that turns a malformed config into a 4-bit default answers nonsense.",
        do="Correct the setting that the message names.",
        example="""
            config.json: quantization_config.bits
            expected 2, 3, 4 or 8
            got      '4'""",
    ),
    RuleText(
        id="config-side-file",
        stage="headers",
        what="""
            `quantize_config.json`, `quant_config.json` or `hf_quant_config.json` gives another method, number
            of bits or group size than `config.json`, and the checkpoint has a quantized layer. Another
            format, symmetry or act order is a note, and qload believes `config.json`. A side file that is
            malformed or of an unsupported method is a warning.""",
        why="Programs differ in the file they read, so that one checkpoint has two meanings.",
        do="Make both files agree, or remove the one next to `config.json`.",
        example="""
            quantize_config.json: bits
            expected 4 as in config.json
            got      8""",
    ),
    RuleText(
        id="unsupported-format",
        stage="headers",
        what="""
            This version of qload does not read the quantization method, or this variant of it. Without a
            config, tensors identify the layers of other programs (MLX, quanto, ComfyUI, HQQ and more). Names
            and first bytes identify files of another kind (GGUF, a pickle of PyTorch, an ONNX graph, a
            TensorRT engine). Opening a pickle can run code, and qload never does.

            The verdict is then `unsupported`, exit code 4: the checkpoint may be sound. If only some layers
            have an unsupported format, a note names them, and the verdict is `incomplete`.""",
        why="Read as another format, or as plain weights, it would load and mean something else.",
        do="""
            Use the program in the remedy, the tool that wrote the checkpoint, or a version of qload that
            reads it.""",
        example="""
            gptq_p: not read by this qload
            reason   the checkpoint_format of config.json is not supported""",
    ),
    RuleText(
        id="excluded-module",
        stage="headers",
        what="""
            The config excludes a module from quantization (`modules_to_not_convert`, `ignore`, ...), but its
            tensors are quantized.""",
        why="""
            An engine that believes the config looks for a plain `weight`, finds none, and fails or leaves the
            layer unfilled. An engine that compares substrings takes `mlp.gate` for `mlp.gate_proj`.""",
        do="Correct the list. qload compares whole names, or whole segments of them.",
        example="""
            model.layers.0.mlp.gate: left out by the config, and quantized
              expected plain tensors, as modules_to_not_convert has 'mlp.gate'
              got      gptq: qweight, qzeros, scales, g_idx
              remedy   take the entry out of modules_to_not_convert, or store the layer plain""",
    ),
)

LAYER_RULES = (
    RuleText(
        id="missing-tensor",
        stage="headers",
        what="A layer has some tensors of its format and lacks another.",
        why="A program that loads the layer anyway fills the gap with zeros or with uninitialized memory.",
        do="Fetch the file again; if the copy is faithful, the writer is broken.",
        example="model.layers.0.mlp.up_proj.scales: not in the checkpoint",
    ),
    RuleText(
        id="tensor-shape",
        stage="headers",
        what="A tensor has another shape than follows from the layer's sizes, bits and groups.",
        why="""
            If the config gives other bits or another group size than the shapes, every weight is read wrong.
            The message gives the bits and groups that fit the shapes.""",
        do="Correct the setting in the config if the shapes are right; otherwise fetch the checkpoint again.",
        example=(
            "model.layers.0.mlp.up_proj.qweight: wrong shape\n"
            "expected (64, 160) = (K*8/32, N)\n"
            "got      (32, 160)\n"
            "the shapes say 4 bits and 2 groups of 128 rows, config.json claims 8 bits and a group size "
            "of 128"
        ),
    ),
    RuleText(
        id="tensor-dtype",
        stage="headers",
        what="""
            A tensor has a dtype that its format does not allow. A plain weight that is stored as bytes is one
            case: it is quantized by a method that the config does not name.""",
        why="The same bytes mean other numbers.",
        do="Fetch the file again; if the copy is faithful, the writer is broken.",
        example="""
            model.layers.0.mlp.up_proj.qweight: wrong dtype
            expected int32
            got      float32""",
    ),
    RuleText(
        id="index-range",
        stage="headers",
        what="A value of `g_idx` is negative, or not below the number of groups.",
        why="Kernels use it as an address without a check, and read other memory as scales.",
        do="Fetch the file again; if the copy is faithful, the writer is broken.",
        example="""
            model.layers.0.mlp.up_proj.g_idx: index out of range
            expected 0 <= index < 2
            got      2 at 5""",
    ),
    RuleText(
        id="index-ambiguous",
        stage="meaning",
        what="""
            `g_idx` is all zero although there are several groups, and the config does not deny act order.
            With `desc_act: false`, zeros mean groups in order, as without a `g_idx`, and a note says so.""",
        why="""
            Some writers mean groups in order by it, and some kernels read it so; by the format's formula
            every row is in group 0. The two readings give different weights.""",
        do="Write the groups out.",
        example="model.layers.0.mlp.up_proj.g_idx: all zero, which has two readings",
    ),
    RuleText(
        id="two-formats",
        stage="headers",
        what="""
            The tensors of one layer belong to two formats, such as `weight` next to `qweight`; or one tensor
            is stored under two of its names, such as `weight_scale` next to `weight_scale_inv`.""",
        why="Programs differ in the one they take.",
        do="Remove the tensors that do not belong to the layer.",
        example="model.layers.0.mlp.up_proj: stored in two formats at once",
    ),
    RuleText(
        id="mismatch",
        stage="headers",
        what="""
            Two facts about a layer disagree: `weight_shape` and the shape of the codes, or the number of
            groups in `q_groups` and the rows of `q_weight`. A shape that fits two packings is also a finding
            if the config names neither.""",
        why="Programs differ in the fact they believe.",
        do="Fetch the file again; if the copy is faithful, the writer is broken.",
        example="""
            model.layers.0.mlp.up_proj.weight_shape: not the shape of this layer
            expected [128, K]
            got      [96, 512]""",
    ),
    RuleText(
        id="field-value",
        stage="values",
        what="""
            A code or a packed field has a value that its format does not allow:

            - a field of 2:4 metadata names one of the four positions twice, or two of them in the wrong
              order;
            - a code of four bits that is stored as a byte needs five bits;
            - a code of bitsandbytes' int8 is -128;
            - the table of values of NF4 or FP4, or of their quantized scales, differs from the table of that
              type.""",
        why="""
            A sparse tensor core reads any four bits as two positions, and would multiply the kept codes by
            the wrong inputs. Kernels that pack codes drop the bits that do not fit. Kernels for NF4 and FP4
            have the table built in and never read the stored one.""",
        do="Pack the layer again. The codes do not show the intended values.",
        example=(
            "model.layers.0.mlp.gate_proj.B_meta: field 0 at (3, 17, 1), it has to be one of 4, 8, 9, 12, "
            "13, 14; 1 in all"
        ),
    ),
    RuleText(
        id="scale-value",
        stage="values",
        what="""
            A scale is NaN, infinite or negative; or it is zero and a divisor; or all scales of a layer are
            zero (all exponents, if scales are stored as exponents) while its codes differ.

            A symmetric quantizer of integers may choose the end of the range to use, and states it by the
            sign: about half of the scales of a GPTQ, AWQ or pack-quantized layer are then negative, and that
            is sound. Negative scales are a finding if they are fewer than one in sixteen, and in every format
            of floats.

            A scale that multiplies may be zero, because quantizers write a group of zeros so. The scales of
            activations, the second scale of NVFP4 and the scales of GPTQModel's FP8 are divisors. Scales that
            are stored as exponents (e8m0, in MXFP4 and FP8) have one NaN, the byte 255.""",
        why="""
            A NaN or an infinity turns a group, and soon all activations, into NaN; a negative scale changes
            the sign of its group.""",
        do="Quantize the layer again, with calibration data that reaches it.",
        example="model.layers.0.mlp.up_proj.scales: NaN scale nan at (0, 3); 1 in all",
    ),
    RuleText(
        id="tensor-parallel",
        stage="--tp",
        what="""
            A layer cannot be split over N ranks (each N of `--tp 1,2,4`) the way models split it: by outputs
            (q, k, v, gate, up, lm_head) or by inputs (o, down).""",
        why="""
            A rank that splits a word or a group reads wrong weights. qload refuses such a split on every
            rank.""",
        do="""
            Take a number of ranks that suits all layers; the remedy names these numbers, and the layers that
            rule out the others. Or quantize with smaller groups.""",
        example="""
            model.layers.0.mlp.down_proj.qzeros: cannot cut K = 384 at 96 for 4 ranks
            cuts must be multiples of 128   as qzeros is (K/128, N/8)""",
    ),
)

EXCEPTION_RULES = (
    RuleText(
        id="argument",
        stage="exception",
        what="An argument of a function, or an option of a command, has a value that qload cannot use.",
        why="The call would have no defined result.",
        do="Pass one of the values that the message expects.",
    ),
    RuleText(
        id="cast",
        stage="exception",
        what="A cast to another dtype would turn finite values into infinities, or small values into zero.",
        why="The loaded layer would differ from the stored one without notice.",
        do="Load with `dtype=None`, which keeps the stored dtype, or with a wider dtype.",
    ),
    RuleText(
        id="error",
        stage="exception",
        what="An error of qload without an id of its own: the id of the base class `QloadError`.",
        why="It is the default of subclasses outside of qload.",
        do="Read the message of the exception.",
    ),
    RuleText(
        id="kernel",
        stage="exception",
        what="No kernel can run a layer, or the chosen kernel cannot.",
        why="The layer cannot be multiplied in this order, dtype or shape on this device.",
        do="Choose another kernel, or load with `target=None`: the stored order always has a kernel.",
    ),
    RuleText(
        id="memory",
        stage="exception",
        what="A device has less free memory than the operation needs at least.",
        why="The operation would fail after it has read a part of the model.",
        do="Free memory, choose a larger device, or share the model among more ranks.",
    ),
    RuleText(
        id="pattern",
        stage="exception",
        what="A layout sentence is not a permutation, or does not fit a tensor.",
        why="Elements would be lost or used twice.",
        do="Correct the sentence, or the sizes that are passed with it.",
    ),
    RuleText(
        id="repack",
        stage="exception",
        what="A weight has no exact form in another layout.",
        why="A repacked weight has to equal the stored one bit for bit.",
        do="Load the weight in its stored layout, or choose a layout without this limit.",
    ),
    RuleText(
        id="unknown-method",
        stage="exception",
        what="No quantization method is registered under a name.",
        why="An engine asked for a method that qload does not have.",
        do="Use one of the registered names, or register the method first.",
    ),
    RuleText(
        id="unread-tensor",
        stage="exception",
        what="Some tensors of a checkpoint have a form that no format reads.",
        why="""
            A program that loads, runs, converts or shards the whole checkpoint would miss them. The exception
            comes before any weight is read.""",
        do="Follow the remedy in the message, or use the tool that wrote the checkpoint.",
    ),
    RuleText(
        id="warm-up",
        stage="exception",
        what="A layer was called before it had its scratch space.",
        why="Kernels allocate nothing during a call.",
        do="Call `qload.warm_up(model, max_input_len)` after the weights are processed.",
    ),
    RuleText(
        id="world",
        stage="exception",
        what="A process of a tensor-parallel group ended, or never started.",
        why="The other ranks cannot continue without it.",
        do="Look for the first error in the log of the lost rank, and start all ranks again.",
    ),
)

# Rule id -> text, of all ids that an exception can have.
ERROR_RULES: Mapping[str, RuleText] = {
    rule.id: rule
    for rules in (FILE_RULES, HEADER_RULES, INDEX_RULES, CONFIG_RULES, LAYER_RULES, EXCEPTION_RULES)
    for rule in rules
}
