// Prettier wraps code at 100 columns; `max-len` covers comments and strings, which it leaves alone.
import js from '@eslint/js';
import { defineConfig } from 'eslint/config';
import typescript from 'typescript-eslint';

export default defineConfig(
  { ignores: ['lib', '**/wire.ts'] },
  js.configs.recommended,
  { rules: { 'max-len': ['error', { code: 100 }] } },
  {
    files: ['**/*.ts'],
    extends: [typescript.configs.recommendedTypeChecked],
    languageOptions: { parserOptions: { projectService: true } },
  },
  {
    files: ['*.mjs'],
    languageOptions: { globals: { process: 'readonly', globalThis: 'readonly' } },
  },
);
