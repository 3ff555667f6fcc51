/** The ids of our commands, for menus, shortcuts and settings. */
export const COMMANDS = {
  show: 'llmdebug:show-runs',
  open: 'llmdebug:open',
  compare: 'llmdebug:compare',
  swap: 'llmdebug:swap',
  reveal: 'llmdebug:reveal',
  delete: 'llmdebug:delete',
  openFolder: 'llmdebug:open-folder',
  recordCell: 'llmdebug:record-cell',
};
