import sys, traceback, torch
from tests.bench import cells, cell_layers
from tests import probe_floor
types=sys.argv[1].split(","); tokens=[int(t) for t in sys.argv[2].split(",")]
print(cells.ROW.format("format", "x", "M", "dequant", "product", "us", "ratio", "MiB", "notes"))
with torch.no_grad():
    for r in cells.plain(8192,"cuda",tokens): print(cells.shown(r),flush=True)
    P={}
    one=cells.Products(8192,"cuda"); cells.Products=lambda *a: one
    for n,m in list(cell_layers.LAYERS.items()):
        cell_layers.LAYERS={n:m}
        try:
            for r in cells.cells(8192,"cuda",tokens,"",types): print(cells.shown(r),flush=True)
        except Exception as e:
            print(n,"FAIL",repr(e)[:300]); tb=traceback.extract_tb(e.__traceback__)[-4:]; print([(t.filename[-30:],t.lineno,t.line[:80]) for t in tb],flush=True)
            torch.cuda.empty_cache()
