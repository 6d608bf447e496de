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
            The path or its `*.safetensors` files do not exist, or a file disappeared. Each part of a
            diffusers pipeline (`model_index.json`) is a checkpoint of its own.""",
        why="There is nothing to read.",
        do="Check the path; for a pipeline, name one of its parts.",
        example="./model: no *.safetensors file in this directory",
    ),
    RuleText(
        id="no-tensors",
        stage="headers",
        what="The files contain no tensor, or the index names none.",
        why="No other rule reports such a model, and an empty index hides the files next to it.",
        do="""
            Fetch the files again. If files lie next to an empty index, write the index again from their
            headers.""",
        example="model.safetensors.index.json: names no tensor, and its folder has model.safetensors",
    ),
    RuleText(
        id="not-safetensors",
        stage="headers",
        what="""
            The path is a file of another kind, such as a Git LFS pointer or a web page. Other model
            formats are an [unsupported-format](unsupported-format.md).""",
        why="The file contains no weights, and can run code in a program that opens it.",
        do="Fetch the file again.",
        example="model.safetensors: is a Git LFS pointer in the place of the file, despite its name",
    ),
    RuleText(
        id="unreadable",
        stage="headers",
        what="The system refuses to read a file, or it is a directory, a FIFO, a socket or a device.",
        why="Nothing is known about its tensors.",
        do="Check the permissions and the disk.",
        example="model.safetensors: cannot be read: Permission denied",
    ),
    RuleText(
        id="file-length",
        stage="headers",
        what="The file is shorter or longer than its header says, or its length changed after it was opened.",
        why="Downloads are often interrupted. A program that maps the file into memory reads past its end.",
        do="Fetch the file again.",
        example="model.safetensors: truncated: its header accounts for 75 bytes, the file has 70",
    ),
    RuleText(
        id="file-replaced",
        stage="headers",
        what="A file was written or replaced after its header was read.",
        why="The same bytes of the new file may be other tensors.",
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
        what="Files are numbered `-k-of-n`, from 0 or 1, and the directory lacks some of the n files.",
        why="A download that stopped between two files leaves intact files.",
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
            The header length in the first eight bytes exceeds the file or the format's limit, or the file
            is too short for a header.""",
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
            than a natural number. Or its name is longer than 1,024 characters or has an empty segment; its
            shape has more than 25 dimensions, or one above 2**24 in a tensor without elements.""",
        why="Such a shape can make a program read outside of the tensor, or keep it busy for ever.",
        do="Fetch the file again; if the copy is faithful, the writer is broken.",
        example="model.safetensors: a: shape [-2] is not a list of at most 25 non-negative integers",
    ),
    RuleText(
        id="dtype",
        stage="headers",
        what="A tensor has a dtype that this version of qload does not read.",
        why="Bytes of an unknown dtype have no meaning.",
        do="Use a version of qload that reads it, or ask the writer for another dtype.",
        example="model.safetensors: a: has an unsupported dtype: 'F4'",
    ),
    RuleText(
        id="offset-gap",
        stage="headers",
        what="Bytes between two tensors belong to no tensor.",
        why="A second file can hide in a gap, and the format forbids it.",
        do="Fetch the file again; if the copy is faithful, the writer is broken.",
        example="model.safetensors: b: leaves a hole before it of 4 bytes",
    ),
    RuleText(
        id="offset-overlap",
        stage="headers",
        what="Two tensors claim the same bytes.",
        why="The format forbids it; the file is damaged, or made to deceive.",
        do="Fetch the file again; if the copy is faithful, the writer is broken.",
        example="model.safetensors: b: overlaps the tensor before it by 4 bytes",
    ),
    RuleText(
        id="offset-span",
        stage="headers",
        what="Dtype and shape need another number of bytes than data_offsets span.",
        why="A reader that believes the wrong one reads bytes of another tensor.",
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
            Two files contain a tensor of one name. Or a file outside of the index, such as
            `model.safetensors`, repeats a tensor of the index, and some programs read it instead.""",
        why="The loaded tensor depends on the program, or the order of files.",
        do="Remove the file that does not belong to the checkpoint, or name the right files in an index.",
        example="two.safetensors: a: is also in one.safetensors",
    ),
)

INDEX_RULES = (
    RuleText(
        id="index-json",
        stage="headers",
        what="""
            The index is not JSON or has no weight_map from names to files, or the directory has several
            indices without the usual name.""",
        why="The index names the files of the checkpoint.",
        do="Fetch the file again; if the copy is faithful, the writer is broken.",
        example="model.safetensors.index.json: weight_map has to map tensor names to file names",
    ),
    RuleText(
        id="index-mismatch",
        stage="headers",
        what="""
            The index places a tensor in a file without it, lacks a tensor of a file, or names no tensor of
            a numbered file in the directory.""",
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
            The index names something other than a `*.safetensors` file in its own directory, such as a
            path with `..`, an absolute path or a drive.""",
        why="A checkpoint must not make a program read other files. Symbolic links are followed.",
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
        why="A server that takes a 4-bit default instead answers nonsense.",
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
            `quantize_config.json`, `quant_config.json` or `hf_quant_config.json` contradicts the method,
            bits or group size of `config.json`, and a layer is quantized. Another format, symmetry or act
            order is a note. A malformed side file, or one of an unsupported method, is a warning.""",
        why="Programs differ in the file they read; qload believes `config.json`.",
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
            config, tensors identify the method (MLX, quanto, HQQ and more), and first bytes identify other
            files (GGUF, ONNX, a pickle, which qload never opens).

            The verdict is `unsupported`, exit code 4: the checkpoint may be sound. If only some layers are
            unsupported, a note names them, and the verdict is `incomplete`.""",
        why="Read as another format, it would load and mean something else.",
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
            An engine that believes the config finds no plain `weight`, and fails or leaves the layer
            unfilled. Some engines take `mlp.gate` for `mlp.gate_proj`.""",
        do="Correct the list. qload compares whole names, or whole segments of them.",
        example="""
            model.layers.0.mlp.gate: left out by the config, and quantized
              expected plain tensors, as modules_to_not_convert has 'mlp.gate'
              got      gptq: qweight, qzeros, scales, g_idx""",
    ),
)

LAYER_RULES = (
    RuleText(
        id="missing-tensor",
        stage="headers",
        what="A layer has some tensors of its format and lacks another.",
        why="A program that loads the layer anyway fills the gap with zeros or uninitialized memory.",
        do="Fetch the file again; if the copy is faithful, the writer is broken.",
        example="model.layers.0.mlp.up_proj.scales: not in the checkpoint",
    ),
    RuleText(
        id="tensor-shape",
        stage="headers",
        what="A tensor has another shape than follows from the layer's sizes, bits and groups.",
        why="""
            With other bits or groups every weight is read wrong. The message gives those that fit the
            shapes.""",
        do="Correct the setting in the config if the shapes are right; otherwise fetch the checkpoint again.",
        example="""
            model.layers.0.mlp.up_proj.qweight: wrong shape
            expected (64, 160) = (K*8/32, N)
            got      (32, 160)""",
    ),
    RuleText(
        id="tensor-dtype",
        stage="headers",
        what="""
            A tensor has a dtype that its format does not allow. A plain weight stored as bytes is
            quantized by a method that the config does not name.""",
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
        why="Kernels use it as an unchecked address, and read other memory as scales.",
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
            `g_idx` is all zero over several groups, and the config does not deny act order. With
            `desc_act: false`, a note says that groups are in order.""",
        why="Some writers and kernels mean groups in order; by the format's formula every row is in group 0.",
        do="Write the groups out.",
        example="model.layers.0.mlp.up_proj.g_idx: all zero, with two readings",
    ),
    RuleText(
        id="two-formats",
        stage="headers",
        what="""
            The tensors of one layer belong to two formats, such as `weight` and `qweight`; or one tensor
            has two names, such as `weight_scale` and `weight_scale_inv`.""",
        why="Programs differ in the one they take.",
        do="Remove the tensors that do not belong to the layer.",
        example="model.layers.0.mlp.up_proj: stored in two formats at once",
    ),
    RuleText(
        id="mismatch",
        stage="headers",
        what="""
            Two facts about a layer disagree: `weight_shape` and the shape of the codes, or `q_groups` and
            the rows of `q_weight`. Or a shape fits two packings, and the config decides neither.""",
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

            - 2:4 metadata names a position twice, or two in the wrong order;
            - a four-bit code stored as a byte needs five bits;
            - a code of bitsandbytes' int8 is -128;
            - the table of NF4 or FP4, or of their quantized scales, differs from that of the type.""",
        why="""
            Sparse tensor cores multiply the wrong inputs. Packing drops the fifth bit. Kernels for NF4 and
            FP4 ignore the stored table.""",
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
            A scale is NaN, infinite or negative; or it is zero and a divisor; or all scales of a layer (or
            all exponents) are zero while its codes differ.

            In GPTQ, AWQ and pack-quantized layers negative scales are lawful, unless fewer than one in
            sixteen is negative.

            Divisors are the scales of activations, of GPTQModel's FP8, and the second scale of NVFP4.
            Other scales may be zero, for a group of zeros.""",
        why="A NaN or an infinity turns all activations into NaN; a negative scale changes its group's sign.",
        do="Quantize the layer again, with calibration data that reaches it.",
        example="model.layers.0.mlp.up_proj.scales: NaN scale nan at (0, 3); 1 in all",
    ),
    RuleText(
        id="tensor-parallel",
        stage="--tp",
        what="""
            A layer cannot be split over N ranks (each N of `--tp 1,2,4`) as models do: q, k, v, gate, up
            and lm_head by outputs, o and down by inputs.""",
        why="A rank that splits a word or a group reads wrong weights; qload refuses it.",
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
        what="An error without an id of its own has that of the base class `QloadError`.",
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
        why="An operation on the whole checkpoint would miss them. No weight was read.",
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
