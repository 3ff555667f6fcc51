/**
 * Return a module federation container around a CommonJS bundle: JupyterLab calls `init` with the modules that
 * it shares, then `get('./extension')`.
 *
 * A builder would bring a hundred packages for this. Ours bundles nothing that JupyterLab shares and shares
 * nothing itself, so all that is left is to take each module from the scope: the version that is loaded, as
 * they are singletons, else the newest.
 */
export function container(name, shared, bundle) {
  return `var _JUPYTERLAB=globalThis._JUPYTERLAB??={};_JUPYTERLAB[${JSON.stringify(name)}]=(()=>{
let scope,extension;
const modules={};
const pick=versions=>{
  const known=Object.keys(versions).sort((a,b)=>b.localeCompare(a,"en",{numeric:true}));
  return versions[known.find(version=>versions[version].loaded)??known[0]];
};
const load=async name=>{
  if(!scope[name])throw new Error("llmdebug-nb needs "+name+", which this JupyterLab does not share");
  modules[name]=(await pick(scope[name]).get())();
};
const run=()=>{
const module={exports:{}},exports=module.exports,require=name=>modules[name];
${bundle}
return module.exports;
};
return{
  init(shared){scope=shared},
  get(){return extension??=Promise.all(${JSON.stringify(shared)}.map(load)).then(run).then(exports=>()=>exports)},
};
})();
`;
}
