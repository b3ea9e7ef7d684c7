/* dtrain.h - distributed training in one C header
 *
 * Public domain or MIT, at your choice; see the end of LICENSE.
 */
