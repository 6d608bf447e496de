import torch
from tests.bench.timing import microseconds
torch.manual_seed(0)
N=K=8192
F=torch.backends.cuda.matmul
def err(y,x,w):
    e=x.double()@w.double().T; s=x.double().abs()@w.double().abs().T
    return float(((y.double()-e).abs()/s).max()*2**24), float((y.double()-e).norm()/e.norm()*2**24)
for dt in (torch.float16,torch.bfloat16):
    w=(torch.rand(N,K,device="cuda")).to(dt)
    for M in (1,8,64,300,1024):
        x=torch.rand(M,K,device="cuda").to(dt)
        y=torch.ops.aten.mm.dtype(x,w.T,torch.float32)
        a=microseconds([lambda: torch.ops.aten.mm.dtype(x,w.T,torch.float32)]); b=microseconds([lambda: torch.nn.functional.linear(x,w)])
        print(dt,M,"mm32 err u24",err(y[:8],x[:8],w),"us",a,"linear",b,flush=True)
    try:
        F.allow_fp16_accumulation=True
        x=torch.rand(64,K,device="cuda").to(dt)
        print("fp16 acc", err(torch.ops.aten.mm.dtype(x,w.T,torch.float32),x,w))
    except Exception as e: print("fp16 acc",repr(e)[:200])
    F.allow_fp16_accumulation=False
w8=torch.randint(0,0x7e,(N,K),dtype=torch.uint8,device="cuda").view(torch.float8_e4m3fn)
one=torch.ones((),device="cuda")
for M in (1,8,17,64,300,1024):
    x8=torch.randint(0,0x7e,(M,K),dtype=torch.uint8,device="cuda").view(torch.float8_e4m3fn)
    for fast in (False,True):
        try:
            f=lambda: torch._scaled_mm(x8,w8.T,one,one,out_dtype=torch.float32,use_fast_accum=fast)
            y=f(); print("scaled_mm",M,fast,err(y[:8],x8[:8].float(),w8.float()),microseconds([f]))
        except Exception as e: print("scaled_mm",M,fast,repr(e)[:300])
w=torch.randn(N,K,device="cuda").clamp(-3,3).to(torch.float8_e4m3fn)
for M in (1,8,64,300,1024):
    x8=torch.randn(M,K,device="cuda").to(torch.float8_e4m3fn)
    sb=torch.rand(N//128,K//128,device="cuda")+.5; sa=torch.rand(K//128,M,device="cuda").T+.5
    xs=x8.float()*sa.repeat_interleave(128,1); ws=w.float()*sb.repeat_interleave(128,0).repeat_interleave(128,1)
    for od in (torch.bfloat16,torch.float32):
        for nm,b in (("NK^T",sb.T),("KN",sb.T.contiguous())):
            try:
                f=lambda: torch._scaled_mm(x8,w.T,sa,b,out_dtype=od)
                y=f(); print("block",M,od,nm,err(y[:8],xs[:8],ws),microseconds([f]))
            except Exception as e: print("block",M,od,nm,repr(e)[:160])
a=torch.randint(-128,128,(1056,K),dtype=torch.int8,device="cuda"); b=torch.randint(-128,128,(N,K),dtype=torch.int8,device="cuda")
for M in (32,64,320,1056):
    print("int_mm",M,microseconds([lambda: torch._int_mm(a[:M],b.T)]), torch.equal(torch._int_mm(a[:M],b.T)[:4].double(),a[:4].double()@b.double().T))
