/** The names of our commands, as menus, shortcuts and the settings of JupyterLab know them. */
export const COMMANDS = {
  show: 'llmdebug:show-runs',
  open: 'llmdebug:open',
  compare: 'llmdebug:compare',
  reveal: 'llmdebug:reveal',
  delete: 'llmdebug:delete',
  openFolder: 'llmdebug:open-folder',
  recordCell: 'llmdebug:record-cell',
};
