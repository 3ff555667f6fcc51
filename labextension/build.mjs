// Bundles the explorer into one ES module, which the Python widget sends to the page.
import { build, context } from 'esbuild';

const watch = process.argv.includes('--watch');
const widget = {
  entryPoints: ['src/widget/index.ts'],
  outfile: '../llmdebug_nb/static/widget.js',
  bundle: true,
  format: 'esm',
  target: 'es2022',
  minify: !watch,
  loader: { '.css': 'text' },
  charset: 'utf8',
  legalComments: 'none',
  logLevel: 'warning',
};

if (watch) await (await context(widget)).watch();
else await build(widget);
