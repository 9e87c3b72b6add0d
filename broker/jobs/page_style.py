"""Looks of the page of a report."""

STYLE = """
:root{
  color-scheme:light dark;
  --bg:#f6f7f9;
  --card:#fff;
  --ink:#1c2330;
  --dim:#5a6577;
  --line:#dde2ea;
  --good:#1f7a4d;
  --warn:#9a6700;
  --bad:#b3261e;
  --a:#3366cc;
  --b:#8a9bb8}
@media(prefers-color-scheme:dark){
  :root{
    --bg:#12151b;
    --card:#1b2029;
    --ink:#e6e9ef;
    --dim:#98a3b5;
    --line:#2d3542;
    --good:#5ecb92;
    --warn:#e0b14c;
    --bad:#ff8a80;
    --a:#7aa2f7;
    --b:#54627a}
}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.45 system-ui,sans-serif}
main{max-width:60rem;margin:0 auto;padding:1rem}
h1{margin:.2rem 0;font-size:1.5rem}
h2{margin:0 0 .4rem;font-size:1.1rem}
header,section{
  background:var(--card);
  border:1px solid var(--line);
  border-radius:10px;
  padding:1rem;
  margin-bottom:1rem}
header{border-left:6px solid var(--good)}
header.warnings,header.incomplete{border-left-color:var(--warn)}
header.findings{border-left-color:var(--bad)}
p{margin:.3rem 0;color:var(--dim);overflow-wrap:anywhere}
.badge{
  display:inline-block;
  margin:0;
  font-weight:600;
  text-transform:uppercase;
  font-size:.8rem;
  letter-spacing:.05em;
  color:var(--good)}
.warnings .badge,.incomplete .badge{color:var(--warn)}
.findings .badge{color:var(--bad)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(8rem,1fr));gap:.8rem}
.tiles b{display:block;font-size:1.35rem;font-variant-numeric:tabular-nums}
.tiles span{color:var(--dim);font-size:.85rem}
.bars{
  width:100%;
  height:9rem;
  display:block;
  border-bottom:1px solid var(--line);
  background:linear-gradient(var(--line) 1px,transparent 1px) 0 0/100% 25%}
.bars rect{fill:var(--a)}
.bars rect:hover{opacity:.7}
.row{width:100%;height:.9rem;display:block;background:var(--bg);border-radius:4px}
.row .ledger{fill:var(--a)}
.row .bucket{fill:var(--b)}
.axis{display:flex;justify-content:space-between;gap:1rem;color:var(--dim);font-size:.85rem}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.92rem}
th,td{text-align:right;padding:.25rem .6rem;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--dim);font-weight:500}
th:first-child,td:first-child{text-align:left}
.list{list-style:none;margin:.8rem 0 0;padding:0}
.list li{
  border-left:4px solid var(--warn);
  padding:.3rem .7rem;
  margin:.4rem 0;
  overflow-wrap:anywhere}
.list li.error{border-left-color:var(--bad)}
.list small{display:block;color:var(--dim)}
dl{display:grid;grid-template-columns:minmax(6rem,35%) 1fr;gap:.2rem 1rem;margin:0}
dt{color:var(--dim)}
dd{margin:0;overflow-wrap:anywhere}
"""
