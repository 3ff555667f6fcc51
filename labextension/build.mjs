/**
 * Bundle the front end.
 *
 * `widget.js` is the ES module that the Python widget sends to the notebook; `page.js` is the
 * script of a saved page. `lib/` holds the JupyterLab extension, in the form that JupyterLab and
 * Notebook 7 load from share/jupyter/labextensions.
 */
import { createHash } from 'node:crypto';
import { cpSync, mkdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { build, context, transformSync } from 'esbuild';
import { container } from './container.mjs';

const watch = process.argv.includes('--watch');
const STATIC = '../llmdebug_nb/show/static';

/** Makes a style sheet, with its imports, a string that the code puts into a <style> element. */
const css = {
  name: 'css',
  setup(plugins) {
    plugins.onLoad({ filter: /\.css$/ }, async ({ path }) => {
      const options = { entryPoints: [path], bundle: true, minify: !watch, write: false };
      const { outputFiles, metafile } = await build({ ...options, metafile: true });
      const watchFiles = Object.keys(metafile.inputs);
      return { contents: outputFiles[0].text, loader: 'text', watchFiles };
    });
  },
};
const common = {
  bundle: true,
  target: 'es2022',
  minify: !watch,
  loader: { '.svg': 'text' },
  plugins: [css],
  charset: 'utf8',
  legalComments: 'none',
  logLevel: 'warning',
};
const widget = {
  ...common,
  entryPoints: ['src/widget/index.ts'],
  outfile: `${STATIC}/widget.js`,
  format: 'esm',
};
const page = {
  ...common,
  entryPoints: ['src/page/index.ts'],
  outfile: `${STATIC}/page.js`,
  format: 'iife',
};
const plugin = {
  ...common,
  entryPoints: ['src/plugin/index.ts'],
  outfile: 'lib/index.js',
  format: 'cjs',
  write: false,
  metafile: true,
  external: ['@codemirror/*', '@jupyterlab/*', '@lumino/*'],
  plugins: [css, { name: 'labextension', setup: plugins => plugins.onEnd(writeExtension) }],
};

/** Write `lib/`: the container, the settings, and the package.json that JupyterLab reads. */
function writeExtension({ outputFiles, metafile, errors }) {
  if (errors.length) return;
  const about = JSON.parse(readFileSync('package.json', 'utf8'));
  for (const key of ['dependencies', 'devDependencies', 'scripts']) delete about[key];
  const outputs = Object.values(metafile.outputs);
  const shared = outputs.flatMap(output => output.imports.map(({ path }) => path));
  const whole = container(about.name, [...new Set(shared)].sort(), outputFiles[0].text);
  const { code } = transformSync(whole, { minify: !watch, charset: 'utf8' });
  const hash = createHash('sha256').update(code).digest('hex').slice(0, 20);
  const load = `static/remoteEntry.${hash}.js`;
  const schemas = `lib/schemas/${about.name}`;
  rmSync('lib', { recursive: true, force: true });
  mkdirSync('lib/static', { recursive: true });
  writeFileSync(`lib/${load}`, code);
  cpSync('schema', schemas, { recursive: true });
  writeFileSync(`${schemas}/package.json.orig`, JSON.stringify(about, null, 2));
  const jupyterlab = { ...about.jupyterlab, _build: { load, extension: './extension' } };
  writeFileSync('lib/package.json', JSON.stringify({ ...about, jupyterlab }, null, 2));
}

for (const bundle of [widget, page, plugin])
  if (watch) await (await context(bundle)).watch();
  else await build(bundle);
