// Rules for the page's modules: ESLint's recommended ones, and others that find mistakes. Layout is no matter of a linter.

import js from '@eslint/js';
import globals from 'globals';

export default [
  { ignores: ['.venv*/', 'build/'] },
  {
    ...js.configs.recommended,
    files: ['launcher/tensorboard_plugin/static/**/*.js', 'eslint.config.js'],
  },
  {
    files: ['launcher/tensorboard_plugin/static/**/*.js'],
    languageOptions: { ecmaVersion: 2024, sourceType: 'module', globals: globals.browser },
    linterOptions: { reportUnusedDisableDirectives: 'error' },
    rules: {
      'array-callback-return': 'error',
      'consistent-return': 'error',
      'default-case-last': 'error',
      eqeqeq: ['error', 'always', { null: 'ignore' }], // `== null` asks for null and undefined
      'guard-for-in': 'error',
      'no-alert': 'error',
      'no-console': 'error',
      'no-constructor-return': 'error',
      'no-eval': 'error',
      'no-implicit-coercion': 'error',
      'no-implied-eval': 'error',
      'no-new-func': 'error',
      'no-new-wrappers': 'error',
      'no-param-reassign': 'error',
      'no-promise-executor-return': 'error',
      'no-restricted-globals': ['error', 'event', 'name', 'length', 'status', 'top', 'parent', 'find', 'stop', 'close', 'open', 'print', 'origin', 'self'],
      'no-return-assign': 'error',
      'no-self-compare': 'error',
      'no-sequences': 'error',
      'no-shadow': ['error', { builtinGlobals: false }],
      'no-template-curly-in-string': 'error',
      'no-throw-literal': 'error',
      'no-unmodified-loop-condition': 'error',
      'no-unneeded-ternary': 'error',
      'no-unreachable-loop': 'error',
      'no-unused-expressions': 'error',
      'no-unused-vars': ['error', { args: 'all', argsIgnorePattern: '^_$' }],
      'no-use-before-define': ['error', { functions: false, classes: false, variables: false }],
      'no-useless-return': 'error',
      'no-var': 'error',
      'object-shorthand': 'error',
      'prefer-const': 'error',
      'prefer-promise-reject-errors': 'error',
      'prefer-template': 'error',
      radix: 'error',
    },
  },
];
