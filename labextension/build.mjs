// Bundles the explorer into one ES module, which the Python widget sends to the page, and into a script for pages of its own; and the JupyterLab
// extension into `lib/`, in the form that JupyterLab and Notebook 7 load from share/jupyter/labextensions.
import { createHash } from 'node:crypto';
import { cpSync, mkdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { build, context } from 'esbuild';
import { container } from './container.mjs';

const watch = process.argv.includes('--watch');
const common = {
  bundle: true,
  target: 'es2022',
  minify: !watch,
  loader: { '.css': 'text', '.svg': 'text' },
  charset: 'utf8',
  legalComments: 'none',
  logLevel: 'warning',
};
const widget = {
  ...common,
  entryPoints: ['src/widget/index.ts'],
  outfile: '../llmdebug_nb/show/static/widget.js',
  format: 'esm',
};
const page = {
  ...common,
  entryPoints: ['src/page/index.ts'],
  outfile: '../llmdebug_nb/show/static/page.js',
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
  plugins: [{ name: 'labextension', setup: build => build.onEnd(writeExtension) }],
};

/** Write `lib/` anew: container, settings, and the package.json that tells JupyterLab where they are. */
function writeExtension({ outputFiles, metafile, errors }) {
  if (errors.length) return;
  const { dependencies, devDependencies, scripts, ...about } = JSON.parse(
    readFileSync('package.json', 'utf8'),
  );
  const shared = Object.values(metafile.outputs).flatMap(output =>
    output.imports.map(one => one.path),
  );
  const code = container(about.name, [...new Set(shared)].sort(), outputFiles[0].text);
  const entry = `static/remoteEntry.${createHash('sha256').update(code).digest('hex').slice(0, 20)}.js`;
  rmSync('lib', { recursive: true, force: true });
  mkdirSync('lib/static', { recursive: true });
  writeFileSync(`lib/${entry}`, code);
  cpSync('schema', `lib/schemas/${about.name}`, { recursive: true });
  writeFileSync(`lib/schemas/${about.name}/package.json.orig`, JSON.stringify(about, null, 2));
  const _build = { load: entry, extension: './extension' };
  const whole = { ...about, jupyterlab: { ...about.jupyterlab, _build } };
  writeFileSync('lib/package.json', JSON.stringify(whole, null, 2));
}

for (const bundle of [widget, page, plugin])
  if (watch) await (await context(bundle)).watch();
  else await build(bundle);
