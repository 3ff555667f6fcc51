/** All texts of the extension, ready for translation. */
import type { TranslationBundle } from '@jupyterlab/translation';

/** Inserted into the texts, in which `%` has a meaning. */
const MAGIC = '%%llmdump';

export type Strings = ReturnType<typeof strings>;

export function strings(trans: TranslationBundle) {
  return {
    category: trans.__('llmdebug'),
    showRuns: trans.__('Recorded Runs'),
    showRunsCaption: trans.__('Show the runs recorded in this workspace'),
    open: trans.__('Open'),
    openSelected: trans.__('Open Selected Run or Report'),
    openCaption: trans.__('Open the selected run in the explorer, or the selected report'),
    compare: trans.__('Compare'),
    compareSelected: trans.__('Compare Selected Runs'),
    compareCaption: trans.__('Compare the two selected runs; the first one selected is golden'),
    swap: trans.__('Swap'),
    swapSelected: trans.__('Swap Golden and Mine'),
    swapCaption: trans.__('Make the other of the two selected runs golden'),
    reveal: trans.__('Reveal'),
    revealSelected: trans.__('Reveal Selected Run or Report in File Browser'),
    revealCaption: trans.__('Show the selected run or report in the file browser'),
    delete: trans.__('Delete'),
    deleteSelected: trans.__('Delete Selected Runs and Reports'),
    deleteCaption: trans.__('Delete the selected runs and reports from disk'),
    noSnapshot: trans.__('This saved explorer cannot be read: run its cell again.'),
    notOpened: (place: string) => trans.__('not in this workspace: %1', place),
    openWith: trans.__('Open with llmdebug'),
    compareWith: trans.__('Compare with llmdebug'),
    recordCell: trans.__('Record This Cell with %1', MAGIC),
    recordCellCaption: trans.__('Record the model in this cell, or stop recording it (%1)', MAGIC),

    panel: trans.__('Runs and reports of llmdebug'),
    actions: trans.__('Actions on the selection'),
    list: trans.__('Runs and reports'),
    reports: (folder: string) => trans.__('Reports in %1', folder),
    other: trans.__('Other'),
    search: trans.__('Search runs and reports'),
    nothingFound: (text: string) => trans.__('Nothing here has “%1” in its name or model.', text),
    loading: trans.__('Looking for runs…'),
    noRuns: trans.__('No runs yet. Record one with %1 in a notebook.', MAGIC),
    willCompare: (golden: string, mine: string) => trans.__('Golden: %1. Mine: %2.', golden, mine),
    verdict: (golden: string, verdict: string) => trans.__('against %1: %2', golden, verdict),
    selected: (n: number) => trans._n('%1 selected', '%1 selected', n),
    failed: (text: string) => trans.__('Failed: %1', text),
    tensors: (n: number) => trans._n('%1 tensor', '%1 tensors', n),
    steps: (n: number) => trans._n('%1 step', '%1 steps', n),
    recording: trans.__('recording'),
    incomplete: trans.__('incomplete'),
    rate: (size: string) => trans.__('%1/s', size),

    deleteTitle: trans.__('Delete?'),
    deleteBody: (names: string) => trans.__('This permanently deletes from disk: %1', names),
    cancel: trans.__('Cancel'),
    tab: (golden: string, mine: string) => (mine ? trans.__('%1 and %2', golden, mine) : golden),
    opening: (name: string) => trans.__('Opening %1…', name),
    comparing: (golden: string, mine: string) => trans.__('Comparing %1 and %2…', golden, mine),
    retry: trans.__('Try again'),
    noKernel: trans.__('There is no kernel that can read the runs.'),
    notInstalled: (kernel: string, error: string) =>
      trans.__(
        'The kernel "%1" has no llmdebug-nb (%2). ' +
          'Install it there, or choose another kernel in the settings.',
        kernel,
        error,
      ),
    gone: trans.__('The kernel of this view was shut down.'),
  };
}
