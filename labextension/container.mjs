/**
 * Return a module federation container around a CommonJS bundle, as JupyterLab loads it.
 *
 * JupyterLab calls `init` with a scope, which holds the versions of each module that it shares,
 * then `get('./extension')`, which must resolve to a function that returns the exports.
 * `shared` are the names of the modules that the bundle requires from the scope.
 *
 * See docs/decisions/0008-extension-container.md for why no builder does this.
 */
export function container(name, shared, bundle) {
  return `var _JUPYTERLAB = (globalThis._JUPYTERLAB ??= {});
_JUPYTERLAB[${JSON.stringify(name)}] = (() => {
const modules = {};
let scope, extension;
const newest = versions =>
  Object.keys(versions).sort((a, b) => b.localeCompare(a, "en", { numeric: true }))[0];
const pick = versions =>
  Object.values(versions).find(version => version.loaded) ?? versions[newest(versions)];
const load = async name => {
  if (!scope[name])
    throw new Error("llmdebug-nb needs " + name + ", which this JupyterLab does not share");
  modules[name] = (await pick(scope[name]).get())();
};
const run = () => {
const module = { exports: {} }, exports = module.exports, require = name => modules[name];
${bundle}
return module.exports;
};
const start = () => Promise.all(${JSON.stringify(shared)}.map(load)).then(run);
return {
  init(shared) { scope = shared; },
  get() { return (extension ??= start().then(exports => () => exports)); },
};
})();
`;
}
