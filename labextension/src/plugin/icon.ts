import { LabIcon } from '@jupyterlab/ui-components';
import logo from './logo.svg';

export const icon = new LabIcon({ name: 'llmdebug-nb:logo', svgstr: logo });
